"""Ways of getting a target compiled and loaded; ``trace`` is Dynamo on a restored directory."""
