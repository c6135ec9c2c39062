"""Models with compiled forwards on storage of fixed shapes."""
