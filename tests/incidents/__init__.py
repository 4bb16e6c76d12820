"""Stories end to end: the real agent, real pages over HTTP, the NVML stand-in, a real Alertmanager."""
