"""What is fast and by how much: one module a measurement, `bench.run` the command. See docs/bench.md."""
