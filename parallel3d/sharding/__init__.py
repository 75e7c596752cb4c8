"""The data dimension: what of the parameters, gradients and optimizer states each data rank holds, and what is sent."""
