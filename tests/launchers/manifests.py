"""Reads the manifests in examples/kubernetes.

    manifests.py check               validates them against the schemas of Kubernetes and of the training operator
    manifests.py pod FILE INDEX      prints the variables of a pod, one in each line, and then its command

`check` needs the packages kubernetes-validate and kubeflow-training, which bring the schemas.
"""

import pathlib
import shlex
import sys

import yaml

FOLDER = pathlib.Path(__file__).parents[2] / "examples/kubernetes"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def check():
    import kubernetes_validate

    for document in documents("job.yaml"):
        kubernetes_validate.validate(document, "1.37", strict=True)
        print(f"passed: {document['kind']} of job.yaml")
    (job,) = documents("pytorchjob.yaml")
    check_model(job, "KubeflowOrgV1PyTorchJob", "PyTorchJob")
    for name, replica in job["spec"]["pytorchReplicaSpecs"].items():
        assert name in ("Master", "Worker"), name
        # The schema of the operator's templates is that of a pod.
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, **replica["template"]}
        kubernetes_validate.validate(pod, "1.37", strict=True)
    print("passed: PyTorchJob of pytorchjob.yaml")


def check_model(value, kind, path):
    """Checks a value against a model of the operator's API: its fields, and their types."""
    from kubeflow.training import models

    model = getattr(models, kind)
    fields = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
    for name, inner in value.items():
        assert name in fields, f"{path} has no field {name}; it has {', '.join(fields)}"
        check_type(inner, fields[name], f"{path}.{name}")


def check_type(value, type_, path):
    if type_.startswith("dict("):
        for name, inner in value.items():
            check_type(inner, type_[len("dict(str, ") : -1], f"{path}.{name}")
    elif type_ in ("str", "int", "bool"):
        assert type(value).__name__ == type_, f"{path} is {value!r}, not of type {type_}"
    elif type_.startswith("KubeflowOrgV1"):
        check_model(value, type_, path)
    else:
        # Kubernetes' own type, which kubernetes-validate knows.
        assert type_.startswith("V1"), f"{path} has the unknown type {type_}"


def pod(name, index):
    document = documents(name)[-1]
    spec = document["spec"]
    if document["kind"] == "Job":
        template = spec["template"]
        # What the controller of indexed Jobs adds.
        variables = {"JOB_COMPLETION_INDEX": index}
    else:
        replicas = spec["pytorchReplicaSpecs"]
        template = replicas["Master" if index == 0 else "Worker"]["template"]
        variables = of_operator(document["metadata"]["name"], spec, index)
    (container,) = template["spec"]["containers"]
    for variable in container["env"]:
        # The secret comes from the environment of the test.
        if "value" in variable:
            variables[variable["name"]] = variable["value"]
    for name, value in variables.items():
        print(f"{name}={value}")
    print(shlex.join(container["command"]))


def of_operator(name, spec, index):
    """The variables that the training operator (1.9) sets in a pod of a PyTorchJob with a master."""
    each = int(spec["nprocPerNode"])
    pods = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    address, port = f"{name}-master-0", 23456
    return {
        "PYTHONUNBUFFERED": 1,
        "MASTER_PORT": port,
        "PET_MASTER_PORT": port,
        "MASTER_ADDR": address,
        "PET_MASTER_ADDR": address,
        "WORLD_SIZE": pods * each,
        "RANK": index,
        "PET_NODE_RANK": index,
        "PET_NPROC_PER_NODE": each,
        "PET_NNODES": pods,
    }


if sys.argv[1:] == ["check"]:
    check()
elif sys.argv[1:2] == ["pod"] and len(sys.argv) == 4:
    pod(sys.argv[2], int(sys.argv[3]))
else:
    sys.exit(__doc__)
