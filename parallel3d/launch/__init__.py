"""Starting the workers of a run on this host, their rendezvous, failure reports, and the folder of
a run."""
