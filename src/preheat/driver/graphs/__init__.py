"""Graphs of the driver.

graph         graphs with their nodes, and executables: what the other modules share
captures      streams that are captured into a graph
structure     functions that create, clone, destroy and print graphs, and tell their nodes
edges         the edges of graphs
nodes         functions that add nodes, and read and write their parameters, also in executables
node_kinds    what each kind of node defines; kernel_nodes, copy_nodes, memory_nodes and other_nodes do
executables   instantiation and launch
updates       updates of executables to another graph
user_objects  objects of the program that graphs keep alive
"""
