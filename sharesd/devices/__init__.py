"""Device choice, host memory, pinned buffers and copies between devices."""
