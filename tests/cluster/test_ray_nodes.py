"""A fleet on two Ray nodes: the head here, the engine on a worker with a network, a /tmp and a /dev/shm of its own."""
