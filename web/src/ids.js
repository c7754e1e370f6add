// The ids of one explorer among several in a document: a notebook may show two.
import { createContext } from "preact";
import { useContext } from "preact/hooks";

export const IdPrefix = createContext("");

export const useIds = () => {
  const prefix = useContext(IdPrefix);
  return (name) => prefix + name;
};
