"""Pipeline stages and tensor parallelism inside one runtime."""
