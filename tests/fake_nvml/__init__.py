"""A libnvidia-ml.so.1 in C, driven by a scenario file; README.md says what can be in it."""
