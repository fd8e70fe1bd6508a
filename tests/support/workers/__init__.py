"""Programs that tests start as processes of their own, and what they share."""
