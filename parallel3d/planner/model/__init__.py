"""The planned run: model shape, parameter and FLOP counts, and training options."""
