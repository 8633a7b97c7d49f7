"""The node's end of the UCX data path. May import `core.events`, `transports` and the node's `config`."""
