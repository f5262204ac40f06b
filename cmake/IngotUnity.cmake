# INGOT_UNITY: the sources of a folder are compiled together, as units that include up to twenty of them. A small source spends most of its compile
# time on its headers and on its own copy of the same templates (std::string, std::vector, JSON), so a build from nothing takes half of the processor
# time. On the other hand an edit compiles the whole unit again, and ccache finds an object only while the whole unit is unchanged. The default is ON
# for builds without CUDA that have no ccache, such as the first build of a newcomer, and for builds under sanitizers.
#
# The sources of a unit share one unnamed namespace, so their helpers need different names. Kernels are compiled alone: their helpers and tensors
# have the same short names in many rooms.
set(unity_default OFF)
if(INGOT_CUDA STREQUAL "OFF" AND (INGOT_SANITIZE OR NOT INGOT_CCACHE))
  set(unity_default ON)
endif()
option(INGOT_UNITY "compile the sources of a folder together: half the time from nothing, more after an edit" ${unity_default})

# Sources with definitions or generated includes of their own, and sources whose helpers have the names of a neighbour's helpers.
string(CONCAT unity_alone
  "/kernels/|\\.bench\\.cpp$|/core/version\\.cpp|/io/codecs/byte_coder\\.cpp|/models/gpt/config/presets\\.cpp|/apps/server/page\\.cpp|"
  "/io/formats/(gguf|gguf_blocks|iris)\\.cpp|/gpu/nccl\\.cpp|/models/decode/model/trace\\.cpp")
set(unity_limit 20)

# ingot_unite(sources units): `units` are the sources, with those of a folder that are optimised alike replaced by units. A unit takes part in the lists
# driver_sources and without_json as its sources do.
function(ingot_unite sources result)
  if(NOT INGOT_UNITY)
    set(${result} ${${sources}} PARENT_SCOPE)
    return()
  endif()
  set(units "")
  set(groups "")
  foreach(source ${${sources}})
    if(source MATCHES "${unity_alone}")
      list(APPEND units ${source})
      continue()
    endif()
    get_filename_component(folder ${source} DIRECTORY)
    file(RELATIVE_PATH folder ${CMAKE_CURRENT_SOURCE_DIR}/src ${folder})
    set(group ${folder}/optimised)
    if(source IN_LIST driver_sources)
      set(group ${folder}/drivers)
    endif()
    list(APPEND groups ${group})
    list(APPEND sources_of_${group} ${source})
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group ${groups})
    list(LENGTH sources_of_${group} count)
    math(EXPR parts "(${count} + ${unity_limit} - 1) / ${unity_limit}")
    math(EXPR size "(${count} + ${parts} - 1) / ${parts}")
    math(EXPR last "${count} - 1")
    foreach(first RANGE 0 ${last} ${size})
      list(SUBLIST sources_of_${group} ${first} ${size} members)
      set(text "")
      set(json OFF)
      foreach(source ${members})
        string(APPEND text "#include \"${source}\"\n")
        if(NOT source IN_LIST without_json)
          set(json ON)
        endif()
      endforeach()
      set(unit ${CMAKE_CURRENT_BINARY_DIR}/generated/${group}_${first}.cpp)
      file(CONFIGURE OUTPUT ${unit} CONTENT "${text}" @ONLY)
      list(APPEND units ${unit})
      # The compiler takes an included .cpp for a header, where a member of an unnamed namespace's type would be a mistake.
      set(options $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
      if(NOT json)
        list(APPEND without_json ${unit})
      endif()
      if(group MATCHES "/drivers$")
        list(APPEND driver_sources ${unit})
        list(APPEND options ${ingot_driver_options})
      endif()
      set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "${options}")
    endforeach()
  endforeach()
  foreach(list driver_sources without_json)
    set(${list} ${${list}} PARENT_SCOPE)
  endforeach()
  set(${result} ${units} PARENT_SCOPE)
endfunction()
