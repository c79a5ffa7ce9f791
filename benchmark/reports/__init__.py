"""What a measurement ends with: tables, pages and pictures."""
