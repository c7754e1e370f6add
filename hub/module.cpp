// What Python imports to load the library: a module without contents, for every Python by its limited interface.
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <c10/macros/Macros.h>

PyMODINIT_FUNC C10_CONCATENATE(PyInit_, TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, C10_STRINGIZE(TORCH_EXTENSION_NAME), nullptr, 0, nullptr};
  return PyModule_Create(&module);
}
