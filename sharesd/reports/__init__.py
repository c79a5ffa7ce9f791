"""What benchmarks and training share: questions, tables, plots, the environment of a run."""
