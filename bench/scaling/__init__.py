"""Throughput on several GPUs: ranks measured on this machine, and more of them simulated."""
