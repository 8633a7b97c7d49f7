"""`pdserve up`: one supervisor for all processes of a cluster on this host."""
