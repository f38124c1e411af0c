"""The worker process, which trains. It owns torch and the swarm's thread, and obeys the supervisor."""
