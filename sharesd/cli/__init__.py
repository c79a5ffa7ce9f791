"""Commands, options and console output. Imports every room; nothing imports it."""
