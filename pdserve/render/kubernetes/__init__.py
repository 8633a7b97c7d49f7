"""A cluster file as Kustomize base, overlays and components. Pure, but for `write`.

groups      which processes are alike: one workload for each group; addresses are wired by `up.plan`
contents    the TOML file that the containers of a group read, and which secrets it names
containers  command, probes, stop hooks, volumes and resources
workloads   StatefulSets, the router's Deployment, their services and disruption budgets
several_hosts  workers whose ranks run on several hosts
network     who may connect to whom, after docs/security.md
watching    monitoring and scaling
gateway     pools of workers for gateways with an endpoint picker
storage     tiers on disks of the hosts
files       all of it as files of Kustomize
chart       all of it as a Helm chart
yaml_text   objects as text
"""
