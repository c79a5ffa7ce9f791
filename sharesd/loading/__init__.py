"""Resolution of options before anything is loaded. Imports every room but the CLI."""
