"""Files of any format to rows with common names: paths, readers for each format, the meaning of columns."""
