"""Models whose forwards are compiled functions, on storage of fixed shapes."""
