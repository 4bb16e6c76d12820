"""What is known of GPU hardware: the kernel log's lines, the table of Xids, what happened so far, and a verdict."""
