"""Access to the machine: files, disk quota, ports, GPU power, logging and the revision of the program."""
