"""Files of any format to rows with common names: what is behind a path, what its columns mean, and a reader for each format."""
