"""Graphs of the driver.

graph         graphs with their nodes, and executables: what the other modules share
captures      streams that are captured into a graph
structure     functions that create, clone and destroy graphs, and tell their nodes and edges
kernel_nodes  the parameters of kernel nodes
executables   instantiation, launch and update
user_objects  objects of the program that graphs keep alive
"""
