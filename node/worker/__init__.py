"""The process that trains: owns torch and the swarm, obeys the supervisor; `python -m node.worker --fd N`."""
