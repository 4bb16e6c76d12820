"""What reads the world: one small module per kind of source, each turning answers into samples and gaps."""
