"""Training where a service starts one process on each host: SageMaker, Slurm, Kubernetes."""
