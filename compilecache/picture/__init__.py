"""A picture of what is warm: devices × shapes, for a terminal and as one HTML file."""
