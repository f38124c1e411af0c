"""The worker: the process that trains. It owns torch and the swarm, and obeys the supervisor."""
