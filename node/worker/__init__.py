"""The process that trains: owns torch and the swarm, obeys the supervisor. Started as `python -m node.worker --fd N`."""
