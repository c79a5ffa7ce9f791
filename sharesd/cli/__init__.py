"""Commands, options and console output; no other subpackage imports them."""
