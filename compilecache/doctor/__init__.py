"""What is wrong with a machine, a root, a store or a process, before anything is compiled there."""
