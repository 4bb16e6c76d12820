"""Torture: SIGKILL at a random instant of whole drills; afterwards nothing of ours may be in the world.

    make torture RUNS=1000
    python -m tests.torture --runs 20 --fault packet-loss --seed 7

Needs root and nftables. The real daemon, runner and holder, guards included; only their waiting times are shorter, and
the agent is a stand-in on a unix socket.
"""
