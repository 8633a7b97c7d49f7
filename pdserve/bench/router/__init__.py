"""What a router costs: mock workers, a load of many connections, and the routers beside each other."""
