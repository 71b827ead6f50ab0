/* The short way of operations on arrays that have the buffer protocol, whose outputs are given. What
 * it does not know it passes on to the methods of _operations.py: other arrays, other arguments, and
 * all that is wrong. */

#define PY_SSIZE_T_CLEAN
/* The stable ABI of Python 3.11, which the builds without the interpreter's lock do not have. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <string.h>

#include "kolo.h"

#define OPERATIONS(each) \
  each(all_reduce) each(reduce) each(broadcast) each(all_gather) each(reduce_scatter) each(all_to_all) each(gather) \
      each(scatter) each(barrier) each(send) each(recv) each(send_recv)

enum {
#define NUMBER(name) of_##name,
  OPERATIONS(NUMBER) OPERATION_COUNT
};

/* The functions of the library, with the types that the header gives them. */
static struct {
#define POINTER(name) __typeof__(&kolo_##name) name;
  OPERATIONS(POINTER)
} library;

/* The methods of _operations.py. */
static PyObject *in_python[OPERATION_COUNT];
/* Raises the error of a result. */
static PyObject *raise_error;
/* Types of arrays: array.array, and that of numpy once it is imported. */
static PyObject *array_types[2];

/* What a parameter is. */
enum { X, OUT, OP, RANK, SOURCE, KIND_COUNT };

#define LONGEST 4
/* The parameters of each operation that may be passed by position. */
static struct {
  const char *name;
  int kind;
  PyObject *interned;
} parameters[OPERATION_COUNT][LONGEST] = {
    [of_all_reduce] = {{"x", X}, {"out", OUT}, {"op", OP}},
    [of_reduce] = {{"x", X}, {"out", OUT}, {"op", OP}, {"root", RANK}},
    [of_broadcast] = {{"x", X}, {"root", RANK}},
    [of_all_gather] = {{"x", X}, {"out", OUT}},
    [of_reduce_scatter] = {{"x", X}, {"out", OUT}, {"op", OP}},
    [of_all_to_all] = {{"x", X}, {"out", OUT}},
    [of_gather] = {{"x", X}, {"out", OUT}, {"root", RANK}},
    [of_scatter] = {{"x", X}, {"out", OUT}, {"root", RANK}},
    [of_send] = {{"x", X}, {"peer", RANK}},
    [of_recv] = {{"out", OUT}, {"peer", RANK}},
    [of_send_recv] = {{"x", X}, {"to", RANK}, {"out", OUT}, {"source", SOURCE}},
};

static struct {
  const char *name;
  kolo_redop_t number;
  PyObject *interned;
} reductions[] = {
    {"sum", KOLO_SUM},     {"average", KOLO_AVG}, {"max", KOLO_MAX}, {"min", KOLO_MIN},
    {"product", KOLO_PROD}, {"bitand", KOLO_BAND}, {"bitor", KOLO_BOR}, {"bitxor", KOLO_BXOR},
};
#define REDUCTION_COUNT (sizeof(reductions) / sizeof(*reductions))

/* The base of Communicator. */
typedef struct {
  PyObject_HEAD
  kolo_comm_t comm;
  int rank;
  int size;
} Fast;

/* The memory of an argument, until it is closed. */
typedef struct {
  Py_buffer view;
  kolo_dtype_t dtype;
  size_t count;
} Memory;

/* Returns the type of kolo of elements, or -1. */
static int dtype_of(const Py_buffer *view) {
  const char *format = view->format;
  if (!format || !*format || format[1]) return -1;
  int is_of_2 = view->itemsize == 2, is_of_4 = view->itemsize == 4;
  switch (*format) {
    case '?':
      return KOLO_BOOL;
    case 'b':
      return KOLO_INT8;
    case 'B':
      return KOLO_UINT8;
    case 'e':
      return KOLO_FLOAT16;
    case 'f':
      return KOLO_FLOAT32;
    case 'd':
      return KOLO_FLOAT64;
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      return is_of_2 ? KOLO_INT16 : is_of_4 ? KOLO_INT32 : KOLO_INT64;
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      return is_of_2 ? KOLO_UINT16 : is_of_4 ? KOLO_UINT32 : KOLO_UINT64;
    default:
      return -1;
  }
}

/* Opens the memory of an array of a known type. Returns whether it could. */
static int open_memory(PyObject *array, int flags, Memory *memory) {
  PyObject *type = (PyObject *)Py_TYPE(array);
  if (type != array_types[0] && type != array_types[1] && !PyByteArray_CheckExact(array) && !PyBytes_CheckExact(array) &&
      !PyMemoryView_Check(array)) {
    return 0;
  }
  if (PyObject_GetBuffer(array, &memory->view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags)) {
    PyErr_Clear();
    return 0;
  }
  memory->dtype = dtype_of(&memory->view);
  if (memory->dtype < 0) {
    PyBuffer_Release(&memory->view);
    return 0;
  }
  memory->count = (size_t)(memory->view.len / memory->view.itemsize);
  return 1;
}

/* Reads the number of a rank, which is 0 if it is not given. */
static int read_rank(const Fast *self, PyObject *given, int *rank) {
  *rank = 0;
  if (!given) return 1;
  if (!PyLong_CheckExact(given)) return 0;
  long number = PyLong_AsLong(given);
  if (number == -1) PyErr_Clear();
  *rank = (int)number;
  return number >= 0 && number < self->size;
}

static int read_reduction(PyObject *given, kolo_redop_t *number) {
  *number = KOLO_SUM;
  if (!given) return 1;
  if (!PyUnicode_CheckExact(given)) return 0;
  for (size_t i = 0; i < REDUCTION_COUNT; i++) {
    if (given == reductions[i].interned || PyUnicode_Compare(given, reductions[i].interned) == 0) {
      *number = reductions[i].number;
      return 1;
    }
  }
  return 0;
}

/* Sorts arguments by what they are; those that are not given are NULL. Returns whether it could. */
static int sort(int of, PyObject *const *passed, Py_ssize_t count, PyObject *keywords, PyObject **given) {
  for (int kind = 0; kind < KIND_COUNT; kind++) given[kind] = NULL;
  if (count > LONGEST) return 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!parameters[of][i].name) return 0;
    given[parameters[of][i].kind] = passed[i];
  }
  Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; i++) {
    PyObject *keyword = PyTuple_GetItem(keywords, i);
    int at = 0;
    while (at < LONGEST && parameters[of][at].interned != keyword) at++;
    if (at == LONGEST || given[parameters[of][at].kind]) return 0;
    given[parameters[of][at].kind] = passed[count + i];
  }
  if (given[X] == Py_None) given[X] = NULL;
  if (given[OUT] == Py_None) given[OUT] = NULL;
  return 1;
}

/* Calls the method of _operations.py. */
static PyObject *pass_on(int of, Fast *self, PyObject *const *passed, Py_ssize_t count, PyObject *keywords) {
  PyObject *result = NULL, *named = NULL, *positional = PyTuple_New(count + 1);
  if (!positional) return NULL;
  for (Py_ssize_t i = 0; i <= count; i++) {
    PyObject *each = i == 0 ? (PyObject *)self : passed[i - 1];
    Py_INCREF(each);
    PyTuple_SetItem(positional, i, each);
  }
  if (keywords) {
    if (!(named = PyDict_New())) goto end;
    for (Py_ssize_t i = 0; i < PyTuple_Size(keywords); i++) {
      if (PyDict_SetItem(named, PyTuple_GetItem(keywords, i), passed[count + i])) goto end;
    }
  }
  result = PyObject_Call(in_python[of], positional, named);
end:
  Py_XDECREF(named);
  Py_DECREF(positional);
  return result;
}

static PyObject *raise_of(kolo_result_t result) {
  PyObject *number = PyLong_FromLong(result);
  if (number) {
    Py_XDECREF(PyObject_CallFunctionObjArgs(raise_error, number, NULL));
    Py_DECREF(number);
  }
  return NULL;
}

static PyObject *run(int of, Fast *self, PyObject *const *passed, Py_ssize_t count, PyObject *keywords) {
  PyObject *given[KIND_COUNT];
  kolo_redop_t op;
  int rank, source;
  if (!self->size || !sort(of, passed, count, keywords, given) || !read_reduction(given[OP], &op) || !read_rank(self, given[RANK], &rank) ||
      !read_rank(self, given[SOURCE], &source)) {
    goto unknown;
  }
  int is_message = of == of_send || of == of_recv || of == of_send_recv;
  if (is_message && (!given[RANK] || (of == of_send_recv && !given[SOURCE]))) goto unknown;

  /* What this rank gives and gets. */
  int is_root = rank == self->rank;
  PyObject *x = given[X], *out = given[OUT];
  int has_x = of != of_barrier && of != of_recv && (of != of_scatter || is_root);
  int has_out = of == of_reduce || of == of_gather ? is_root : of == of_broadcast ? !is_root : of != of_barrier && of != of_send;
  if (!has_x) x = NULL;
  if (!has_out) {
    out = NULL;
  } else if (!out && (of == of_all_reduce || of == of_reduce || of == of_broadcast)) {
    out = x;
  }
  if ((has_x && !x) || (has_out && !out)) goto unknown;

  Memory memories[2], *into = &memories[0], *from = x == out ? into : &memories[1];
  if (out && !open_memory(out, PyBUF_WRITABLE, into)) goto unknown;
  if (x && x != out && !open_memory(x, PyBUF_SIMPLE, from)) {
    if (out) PyBuffer_Release(&into->view);
    goto unknown;
  }
  size_t size = (size_t)self->size, given_count = x ? from->count : 0;
  int has_blocks = x && from->view.ndim > 0 && from->view.shape[0] % self->size == 0, fits = 1;
  if (x && out) {
    switch (of) {
      case of_all_reduce:
      case of_reduce:
        fits = into->count == given_count;
        break;
      case of_all_gather:
      case of_gather:
        fits = into->count == given_count * size;
        break;
      case of_reduce_scatter:
      case of_scatter:
        fits = has_blocks && into->count == given_count / size;
        break;
      case of_all_to_all:
        fits = has_blocks && into->count == given_count;
        break;
    }
    fits = fits && from->dtype == into->dtype;
  }
  kolo_result_t result = KOLO_OK;
  if (fits) {
    const void *send = x ? from->view.buf : NULL;
    void *recv = out ? into->view.buf : NULL;
    kolo_dtype_t dtype = x ? from->dtype : out ? into->dtype : KOLO_UINT8;
    kolo_comm_t comm = self->comm;
    Py_BEGIN_ALLOW_THREADS
    switch (of) {
      case of_all_reduce:
        result = library.all_reduce(send, recv, given_count, dtype, op, comm, NULL);
        break;
      case of_reduce:
        result = library.reduce(send, recv, given_count, dtype, op, rank, comm, NULL);
        break;
      case of_broadcast:
        result = library.broadcast(send, (void *)send, given_count, dtype, rank, comm, NULL);
        break;
      case of_all_gather:
        result = library.all_gather(send, recv, given_count, dtype, comm, NULL);
        break;
      case of_reduce_scatter:
        result = library.reduce_scatter(send, recv, into->count, dtype, op, comm, NULL);
        break;
      case of_all_to_all:
        result = library.all_to_all(send, recv, given_count / size, dtype, comm, NULL);
        break;
      case of_gather:
        result = library.gather(send, recv, given_count, dtype, rank, comm, NULL);
        break;
      case of_scatter:
        result = library.scatter(send, recv, into->count, dtype, rank, comm, NULL);
        break;
      case of_barrier:
        result = library.barrier(comm, NULL);
        break;
      case of_send:
        result = library.send(send, given_count, dtype, rank, comm, NULL);
        break;
      case of_recv:
        result = library.recv(recv, into->count, dtype, rank, comm, NULL);
        break;
      case of_send_recv:
        result = library.send_recv(send, given_count, rank, recv, into->count, source, dtype, comm, NULL);
        break;
    }
    Py_END_ALLOW_THREADS
  }
  if (out) PyBuffer_Release(&into->view);
  if (x && x != out) PyBuffer_Release(&from->view);
  if (!fits) goto unknown;
  if (result != KOLO_OK) return raise_of(result);
  PyObject *returned = of == of_broadcast ? x : out ? out : Py_None;
  Py_INCREF(returned);
  return returned;
unknown:
  return pass_on(of, self, passed, count, keywords);
}

#define METHOD(name) \
  static PyObject *name(PyObject *self, PyObject *const *passed, Py_ssize_t count, PyObject *keywords) { \
    return run(of_##name, (Fast *)self, passed, count, keywords); \
  }
OPERATIONS(METHOD)

/* Sets the handle, which is 0 after the end, the rank and the world size. */
static PyObject *bind(PyObject *self, PyObject *arguments) {
  unsigned long long handle;
  int rank, size;
  if (!PyArg_ParseTuple(arguments, "Kii", &handle, &rank, &size)) return NULL;
  ((Fast *)self)->comm = (kolo_comm_t)(uintptr_t)handle;
  ((Fast *)self)->rank = rank;
  ((Fast *)self)->size = size;
  Py_RETURN_NONE;
}

#define ENTRY(of_name) {#of_name, (PyCFunction)(void (*)(void))of_name, METH_FASTCALL | METH_KEYWORDS, NULL},
static PyMethodDef methods[] = {OPERATIONS(ENTRY){"_bind", bind, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"pykolo._fast.Fast", sizeof(Fast), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

/* Makes the base of Communicator: from the addresses of the library's functions, the methods of
 * _operations.py and their documentation, each by name, from what raises the error of a result, and
 * from the type of array.array. */
static PyObject *make(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *addresses, *given_methods, *documentation, *raises, *array_type;
  if (!PyArg_ParseTuple(arguments, "OOOOO", &addresses, &given_methods, &documentation, &raises, &array_type)) return NULL;
  for (int of = 0; of < OPERATION_COUNT; of++) {
    const char *name = methods[of].ml_name;
    PyObject *address = PyDict_GetItemString(addresses, name), *method = PyDict_GetItemString(given_methods, name);
    PyObject *text = PyDict_GetItemString(documentation, name);
    void *function = address ? PyLong_AsVoidPtr(address) : NULL;
    if (!function || !method || !text) return PyErr_Format(PyExc_KeyError, "there is no %s", name);
    memcpy((char *)&library + of * sizeof(function), &function, sizeof(function));
    Py_INCREF(method);
    in_python[of] = method;
    /* For as long as the process lives. */
    Py_INCREF(text);
    if (!(methods[of].ml_doc = PyBytes_AsString(text))) return NULL;
    for (int i = 0; i < LONGEST && parameters[of][i].name; i++) {
      if (!(parameters[of][i].interned = PyUnicode_InternFromString(parameters[of][i].name))) return NULL;
    }
  }
  for (size_t i = 0; i < REDUCTION_COUNT; i++) {
    if (!(reductions[i].interned = PyUnicode_InternFromString(reductions[i].name))) return NULL;
  }
  Py_INCREF(raises);
  raise_error = raises;
  Py_INCREF(array_type);
  array_types[0] = array_type;
  return PyType_FromSpec(&spec);
}

/* Takes the type of numpy's arrays. */
static PyObject *know(PyObject *module, PyObject *type) {
  (void)module;
  Py_INCREF(type);
  Py_XDECREF(array_types[1]);
  array_types[1] = type;
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"make", make, METH_VARARGS, NULL},
    {"know", know, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fast", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) { return PyModule_Create(&definition); }
