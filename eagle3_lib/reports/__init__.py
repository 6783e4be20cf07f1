"""What people see: figures, tables and rows of the notebooks, and the published pages."""
