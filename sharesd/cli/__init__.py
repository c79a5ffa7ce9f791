"""Commands, options and console output; of the other rooms only `reports` imports them."""
