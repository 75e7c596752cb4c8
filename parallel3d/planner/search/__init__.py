"""The search for the fastest layout: what is asked, which layouts are tried, and how those that fit
are ranked."""
