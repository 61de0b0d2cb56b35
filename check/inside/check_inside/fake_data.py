"""Small random data in place of datasets that are not here (--fake-data).

The classes of torchvision.datasets stay what they are: only what reads files is replaced. A sample
depends on its dataset, split and index, so that all ranks and runs read the same ones, and no
global random numbers are drawn.
"""

import inspect
import os
import zlib

from check_inside.record import PLAN, replace

ROWS = {True: 400, False: 51}  # of a training set, and of any other

ARRAYS = {  # shape of an image as it is stored, number of classes
    "CIFAR10": ((32, 32, 3), 10),
    "CIFAR100": ((32, 32, 3), 100),
    "MNIST": ((28, 28), 10),
    "FashionMNIST": ((28, 28), 10),
    "KMNIST": ((28, 28), 10),
    "QMNIST": ((28, 28), 10),
    "EMNIST": ((28, 28), 10),
    "SVHN": ((3, 32, 32), 10),
    "STL10": ((3, 96, 96), 10),
    "USPS": ((16, 16), 10),
}
TENSORS = ("MNIST", "FashionMNIST", "KMNIST", "QMNIST", "EMNIST")  # the others hold NumPy arrays
FOLDERS = {  # number of classes of datasets that read a file per image
    "ImageFolder": 10,
    "DatasetFolder": 10,
    "ImageNet": 1000,
    "Imagenette": 10,
    "Places365": 365,
    "SUN397": 397,
    "Food101": 101,
    "Flowers102": 102,
    "StanfordCars": 196,
    "Caltech101": 101,
    "Caltech256": 257,
    "DTD": 47,
    "Country211": 211,
    "FGVCAircraft": 100,
    "EuroSAT": 10,
    "RenderedSST2": 2,
    "OxfordIIITPet": 37,
    "GTSRB": 43,
    "FER2013": 7,
    "PCAM": 2,
}
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
EMNIST = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 27}

COLUMNS = {  # of datasets of Hugging Face
    "glue/cola": "sentence:str,label:class2,idx:int",
    "glue/sst2": "sentence:str,label:class2,idx:int",
    "glue/mrpc": "sentence1:str,sentence2:str,label:class2,idx:int",
    "glue/rte": "sentence1:str,sentence2:str,label:class2,idx:int",
    "glue/qqp": "question1:str,question2:str,label:class2,idx:int",
    "imdb": "text:str,label:class2",
    "ag_news": "text:str,label:class4",
    "rotten_tomatoes": "text:str,label:class2",
    "yelp_review_full": "text:str,label:class5",
    "wikitext": "text:str",
    "openwebtext": "text:str",
    "allenai/c4": "text:str,timestamp:str,url:str",
    "HuggingFaceFW/fineweb": "text:str,id:str,url:str,token_count:int",
    "HuggingFaceFW/fineweb-edu": "text:str,id:str,url:str,token_count:int",
    "roneneldan/TinyStories": "text:str",
    "tatsu-lab/alpaca": "instruction:str,input:str,output:str,text:str",
    "mnist": "image:gray28,label:class10",
    "cifar10": "img:image32,label:class10",
    "cifar100": "img:image32,fine_label:class100,coarse_label:class20",
    "beans": "image:image500,labels:class3",
    "food101": "image:image256,label:class101",
}
TYPES = "str, int, int10, float, class10, image64 or gray28; or several of them: int10[128]"
SYNTAX = "--fake-data 'NAME=text:str,label:class2'"


def install(name, module):
    """Replace what reads files in torchvision.datasets, or load_dataset of Hugging Face."""
    if PLAN["fake_data"] is None:
        return
    if name == "torchvision.datasets":
        _install_torchvision(module)
    elif hasattr(module, "load_dataset"):  # a script may have a module of that name
        for owner in (module, module.load):
            replace(owner, "load_dataset", lambda original: _observe_load(original, module))


def random_numbers(*key):
    """NumPy's generator for a sample."""
    import numpy

    return numpy.random.default_rng(zlib.crc32(repr(key).encode()))


def rows(name, split):
    """How many samples a split of a dataset has."""
    given = PLAN["fake_data"].get(name, {})
    key = "train" if is_training(split) else "test"
    return int(given.get(key, ROWS[is_training(split)]))


def is_training(split):
    """Whether this is the name of a training set, as far as it tells."""
    split = str(split).lower()
    return "train" in split or not any(word in split for word in ("val", "test"))


# torchvision.


def _install_torchvision(datasets):
    def construct(name, make):
        kind = getattr(datasets, name, None)
        if kind is not None:
            replace(kind, "__init__", lambda original: make(original, name, datasets))
        return kind

    for name in ARRAYS:
        construct(name, _arrays)
    for name in FOLDERS:
        kind = construct(name, _folder)
        if kind is not None:
            kind.__getitem__ = datasets.DatasetFolder.__getitem__
            kind.__len__ = datasets.DatasetFolder.__len__
    construct("VOCSegmentation", _voc)
    construct("VOCDetection", _voc)
    coco = construct("CocoDetection", _coco)
    datasets.VOCSegmentation.__getitem__ = _voc_item(_mask)
    datasets.VOCDetection.__getitem__ = _voc_item(_annotation)
    coco._load_image = lambda self, id: _image("CocoDetection", self.coco.imgs[id]["file_name"])


def _begin(original, datasets, self, args, kwargs):
    """What the constructors have in common. Returns the name of the split."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given |= given.pop("kwargs", {})
    given.pop("self")
    transforms = {
        key: given.pop(key, None) for key in ("transforms", "transform", "target_transform")
    }
    datasets.VisionDataset.__init__(self, given.pop("root", None), **transforms)
    given.pop("loader", None)
    for key, value in given.items():
        setattr(self, key, value)
    if "train" in given:
        return "train" if given["train"] else "test"
    split = given.get("split") or given.get("image_set") or given.get("annFile")
    return str(split or os.path.basename(os.path.normpath(str(self.root))))


def _classes(name, default):
    return int(PLAN["fake_data"].get(name, {}).get("classes", default))


def _arrays(original, name, datasets):
    shape, number = ARRAYS[name]

    def __init__(self, *args, **kwargs):
        import numpy
        import torch

        split = _begin(original, datasets, self, args, kwargs)
        if name == "EMNIST":
            split = "train" if kwargs.get("train", True) else "test"
            classes = _classes(name, EMNIST.get(self.split, number))
        else:
            classes = _classes(name, number)
        random = random_numbers(name, split)
        count = rows(name, split)
        targets = random.integers(classes, size=count)
        light = (targets * 127 // classes).reshape(-1, *[1] * len(shape))  # something to learn
        self.data = (random.integers(128, size=(count, *shape)) + light).astype(numpy.uint8)
        if name in TENSORS:
            self.data, targets = torch.from_numpy(self.data), torch.from_numpy(targets)
            self.targets = targets[:, None].expand(-1, 8) if name == "QMNIST" else targets
        else:
            self.targets = targets.tolist()
        if name in ("SVHN", "STL10"):
            del self.targets
            self.labels = targets
        if len(getattr(self, "classes", ())) != classes:
            names = CIFAR10.split() if name == "CIFAR10" else [f"class{i}" for i in range(classes)]
            self.classes = names
        if not isinstance(getattr(type(self), "class_to_idx", None), property):
            self.class_to_idx = {label: i for i, label in enumerate(self.classes)}

    return __init__


def _folder(original, name, datasets):
    def __init__(self, *args, **kwargs):
        split = _begin(original, datasets, self, args, kwargs)
        number = _classes(name, FOLDERS[name])
        self.classes = [f"class{i:04}" for i in range(number)]
        self.class_to_idx = {label: i for i, label in enumerate(self.classes)}
        self.wnids, self.wnid_to_idx = self.classes, self.class_to_idx
        labels = random_numbers(name, split).integers(number, size=rows(name, split)).tolist()
        labels.sort()  # as the files of folders are
        self.targets = self._labels = labels
        self.samples = self.imgs = self._samples = [
            (f"{self.root}/{self.classes[label]}/{split}-{i:05}.jpg", label)
            for i, label in enumerate(labels)
        ]
        self.loader = lambda path: _image(*path.split("/")[-2:])

    return __init__


def _image(kind, name):
    """A picture for a file of a folder; pictures of one folder are equally bright."""
    import numpy
    from PIL import Image

    random = random_numbers(kind, name)
    height, width = random.integers(240, 320, size=2)
    light = zlib.crc32(kind.encode()) % 128
    pixels = random.integers(128, size=(height, width, 3)) + light
    return Image.fromarray(pixels.astype(numpy.uint8))


def _voc(original, name, datasets):
    def __init__(self, *args, **kwargs):
        split = _begin(original, datasets, self, args, kwargs)
        files = [f"{self.root}/{split}-{i:05}" for i in range(rows(name, split))]
        self.images = [f"{file}.jpg" for file in files]
        self.targets = [f"{file}{self._TARGET_FILE_EXT}" for file in files]

    return __init__


def _voc_item(make):
    def __getitem__(self, index):
        path = self.images[index]
        image = _image("VOC", os.path.basename(path))
        target = make(os.path.basename(path), image)
        if self.transforms is not None:
            image, target = self.transforms(image, target)
        return image, target

    return __getitem__


def _mask(name, image):
    """Classes 0 to 20 in squares, and 255 between them, as VOC has it."""
    import numpy
    from PIL import Image

    classes = random_numbers("mask", name).integers(21, size=(8, 8))
    mask = classes.repeat(40, 0).repeat(40, 1)
    mask[::40] = mask[:, ::40] = 255
    picture = Image.fromarray(mask[: image.height, : image.width].astype(numpy.uint8))
    picture.putpalette(bytes(768))  # a picture of mode "P", as VOC has
    return picture


def _boxes(key, width, height):
    """One to four boxes (left, top, width, height), each with a number below 90."""
    random = random_numbers("boxes", key)
    for _ in range(random.integers(1, 5)):
        left, top = random.integers(0, width // 2), random.integers(0, height // 2)
        size = random.integers(20, min(width, height) // 2, size=2)
        yield [float(left), float(top), *map(float, size)], int(random.integers(1, 90))


def _annotation(name, image):
    names = VOC.split()
    objects = [
        {
            "name": names[number % len(names)],
            "difficult": "0",
            "bndbox": {
                "xmin": str(int(left)),
                "ymin": str(int(top)),
                "xmax": str(int(left + width)),
                "ymax": str(int(top + height)),
            },
        }
        for (left, top, width, height), number in _boxes(name, *image.size)
    ]
    size = {"width": str(image.width), "height": str(image.height), "depth": "3"}
    return {"annotation": {"filename": name, "size": size, "object": objects}}


VOC = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike "
    "person pottedplant sheep sofa train tvmonitor"
)


def _coco(original, name, datasets):
    def __init__(self, *args, **kwargs):
        from pycocotools.coco import COCO

        split = _begin(original, datasets, self, args, kwargs)
        images, annotations = [], []
        for number in range(1, rows(name, split) + 1):
            file = f"{os.path.basename(split)}-{number:05}.jpg"
            width, height = _image(name, file).size
            images.append({"id": number, "file_name": file, "width": width, "height": height})
            for (left, top, wide, high), category in _boxes(file, width, height):
                right, bottom = left + wide, top + high
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": category,
                        "bbox": [left, top, wide, high],
                        "area": wide * high,
                        "iscrowd": 0,
                        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
                        "caption": _text(random_numbers("caption", file)),
                    }
                )
        categories = [{"id": i, "name": f"class{i}"} for i in range(1, 91)]
        self.coco = COCO()
        self.coco.dataset = {
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        self.coco.createIndex()
        self.ids = sorted(self.coco.imgs)

    return __init__


# Hugging Face.


def _observe_load(original, datasets):
    def load_dataset(*args, **kwargs):
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        path = str(given["path"])
        if given["data_files"] or os.path.exists(path):  # it is here
            return original(*args, **kwargs)
        return fake_dataset(datasets, path, given["name"], given["split"], given["streaming"])

    return load_dataset


def fake_dataset(datasets, path, name=None, split=None, streaming=False):
    """What load_dataset returns: a Dataset, or all splits in a DatasetDict."""
    columns = _columns(path, name)
    sizes = {key: rows(path, key) for key in ("train", "validation", "test")}

    def load(part):
        if part in sizes:
            return _dataset(datasets, path, columns, part, sizes[part])
        chosen = datasets.ReadInstruction.from_spec(part).to_absolute(sizes)
        parts = [
            load(one.splitname).select(range(one.from_ or 0, one.to or sizes[one.splitname]))
            for one in chosen
        ]
        return datasets.concatenate_datasets(parts)

    if split is None:
        result = datasets.DatasetDict({key: load(key) for key in sizes})
        if not streaming:
            return result
        streams = {key: part.to_iterable_dataset() for key, part in result.items()}
        return datasets.IterableDatasetDict(streams)
    if isinstance(split, list | tuple):
        return [fake_dataset(datasets, path, name, one, streaming) for one in split]
    result = load(str(split))
    return result.to_iterable_dataset() if streaming else result


def _columns(path, name):
    """Columns and their types; the name of an owner may be missing, as in nyu-mll/glue."""
    given = PLAN["fake_data"]
    short = path.rpartition("/")[2]
    for key in (f"{path}/{name}", path, f"{short}/{name}", short):
        columns = {k: v for k, v in given.get(key, {}).items() if k not in ("train", "test")}
        if columns:
            return columns
        if key in COLUMNS:
            return dict(column.split(":") for column in COLUMNS[key].split(","))
    syntax = SYNTAX.replace("NAME", path)
    raise SystemExit(f"--fake-data: what columns does the dataset {path} have? Tell: {syntax}")


def _dataset(datasets, path, columns, split, size):
    features, values = {}, {}
    for column, kind in columns.items():
        features[column], make = _kind(datasets, kind)
        values[column] = [make(random_numbers(path, column, split, i), i) for i in range(size)]
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def _kind(datasets, kind):
    """The feature for a type such as int10, and the function that makes a value of it."""
    base, _, length = kind.rstrip("]").partition("[")
    if length:
        feature, make = _kind(datasets, base)
        return [feature], lambda random, i: [make(random, i) for _ in range(int(length))]
    word = base.rstrip("0123456789")
    number = int(base[len(word) :] or 0)
    if word == "str":
        return datasets.Value("string"), lambda random, i: _text(random)
    if word == "float":
        return datasets.Value("float32"), lambda random, i: random.random()
    if word == "int":
        make = (lambda random, i: int(random.integers(number))) if number else lambda random, i: i
        return datasets.Value("int64"), make
    if word == "class":
        return datasets.ClassLabel(number), lambda random, i: int(random.integers(number))
    if word in ("image", "gray"):
        shape = [number or 64] * 2 + [3] * (word == "image")
        return datasets.Image(), lambda random, i: _picture(random, shape)
    raise SystemExit(f"--fake-data: {kind} is none of {TYPES}")


def _picture(random, shape):
    import numpy
    from PIL import Image

    return Image.fromarray(random.integers(256, size=shape).astype(numpy.uint8))


WORDS = "a the one some cat dog bird house river red old small sees finds is was and or not"


def _text(random):
    words = random.choice(WORDS.split(), size=random.integers(4, 60))
    return " ".join(words).capitalize() + "."
