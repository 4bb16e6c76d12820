"""`tocsin demo`: a whole node on this machine without a GPU. GPUs, engines and users are simulated, the rest is real.

Nothing of the agent imports this: a real node's GPUs are read by agent.sources.nvml, and by nobody else.
"""
