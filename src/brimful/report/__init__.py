"""What people look at: terminal tables of what the rest of the package found out."""
