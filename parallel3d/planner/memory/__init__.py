"""How many bytes a device holds, by kind, and which layout change would help where they do not
fit."""
