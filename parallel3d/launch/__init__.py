"""Starting workers on this host, how they meet, what a failure tells the user, and the folder of a
run."""
