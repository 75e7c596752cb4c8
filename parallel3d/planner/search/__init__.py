"""The search for the fastest layout: the request, the candidates, and their ranking."""
