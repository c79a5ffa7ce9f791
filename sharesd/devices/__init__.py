"""Device choice, host memory, pinned buffers and device-to-device copies. Imports the config alone."""
