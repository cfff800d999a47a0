"""Graphs of the driver.

graph         graphs with their nodes, and executables: what the other modules share
captures      streams that are captured into a graph
structure     functions that create, clone and destroy graphs, and tell their nodes and edges
nodes         functions that add nodes and change their parameters, in graphs and executables
parameters    the structures with the parameters of each kind of node
executables   instantiation, launch and update of the whole graph
user_objects  objects of the program that graphs keep alive
"""
