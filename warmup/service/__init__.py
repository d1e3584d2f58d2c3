"""The long-running service: a queue of plans, one worker at a time, and a page to see what is warm."""
