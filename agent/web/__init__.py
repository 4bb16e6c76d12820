"""The agent's own HTTP: /metrics, /livez, /healthz on TCP, and the unix socket of the command line."""
