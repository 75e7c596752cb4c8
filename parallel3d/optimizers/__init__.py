"""The optimizers: torch's own where each element is stepped by itself, and ours where a step needs
a whole matrix. All step this rank's part of each parameter (`LocalParameter.local`), and lay their
states out as the parameter is."""
